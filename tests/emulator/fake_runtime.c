// Stand-in for libcute_dsl_runtime.so: the shims that host code compiled by CuTe DSL calls, without a GPU. Linked into the
// same shared object as the host code, so that nothing else in the process is affected. Launches go to a hook.
#include <stdint.h>
#include <string.h>

typedef struct {
    uint32_t grid[3], block[3];
    uint64_t dynamic_shared;
    void *stream;
    void *attributes;  // 72 bytes each: id, then the value at offset 8
    uint32_t attribute_count;
} launch_config;

typedef int (*launch_hook)(const char *kernel, launch_config *config, void **arguments);

static launch_hook hook;
static char names[256][4096];
static int name_count;

void emulator_set_hook(launch_hook h) { hook = h; }

int _cudaLaunchKernelEx(void *config, void *kernel, void **arguments) { return hook ? hook(kernel, config, arguments) : 1; }

int _cudaLaunchKernel(void *kernel, int gx, int gy, int gz, int bx, int by, int bz, void *stream, uint64_t shared, void **arguments) {
    launch_config c = {{gx, gy, gz}, {bx, by, bz}, shared, stream, 0, 0};
    return _cudaLaunchKernelEx(&c, kernel, arguments);
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    for (int i = 0; i < name_count; i++)
        if (!strncmp(names[i], name, 4095)) { *kernel = names[i]; return 0; }
    if (name_count == 256) return 1;
    strncpy(names[name_count], name, 4095);
    *kernel = names[name_count++];
    return 0;
}

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, int n, void *c, void *d, int m) { *library = (void *)code; return 0; }
int _cudaLibraryUnload(void *library) { return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *kernel, int threads, uint64_t shared) { *blocks = 1; return 0; }
// Called before every launch with the module's own functions: one loads the library, one fetches its kernels for a device.
int cuda_dialect_init_library_once(void **library, int (*load)(void **), int (*load_to_device)(void **, int), void *set_error) {
    if (*library) return 0;
    int error = load(library);
    return error ? error : load_to_device(library, 0);
}

int cuda_dialect_unload_library_once(void) { return 0; }
void cuda_dialect_assert_success(int error) {}
void cuda_dialect_print_on_error(int error) {}
const char *cuda_dialect_get_error_name(int error) { return "cudaErrorEmulated"; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void) {}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void) {}
