"""What the emulator reports when a kernel breaks a rule.

Every fault has a short code, so that a test can name the fault it expects and a caller can ignore one it
knows of (`run(..., ignore={"tcgen05-wait-ld"})`). The codes and what they mean are the table FAULTS.
"""

FAULTS = {
    "global-bounds": "a global access outside every registered tensor",
    "launch-order": "in a launch that may begin before the end of the one before it (programmatic dependent"
    " launch), before its griddepcontrol.wait a warp read what the one before writes, wrote what that one"
    " touches, copied asynchronously, accessed memory in a first launch or let the next launch begin; or a"
    " CTA had no wait",
    "shared-bounds": "an access outside the CTA's shared memory, or to a CTA that is not in the cluster",
    "tmem-bounds": "an access outside the TMEM columns that the CTA allocated, or to another warp's lanes",
    "misaligned": "an address that breaks the instruction's alignment rule",
    "uninit-register": "a register lane was read before anything wrote it",
    "uninit-shared": "bytes of shared memory were read before anything wrote them",
    "uninit-tmem": "TMEM cells were read before anything wrote them",
    "async-overlap": "memory was touched while an asynchronous operation still reads or writes it",
    "stale-read": "memory was read or rewritten with nothing ordering the access after the earlier one",
    "missing-proxy-fence": "the async proxy reads shared memory that generic stores wrote without"
    " fence.proxy.async",
    "register-in-flight": "a register was touched while wgmma or tcgen05.ld still owns it",
    "tcgen05-wait-ld": "the result of tcgen05.ld was used before tcgen05.wait::ld",
    "tcgen05-fence": "a tcgen05 operation relies on one of another thread or of the tensor pipe without"
    " tcgen05.fence::before_thread_sync there or tcgen05.fence::after_thread_sync here",
    "wgmma-fence": "wgmma without wgmma.fence after other accesses to its registers",
    "mbarrier-init": "an mbarrier was used before mbarrier.init, or remotely before its initialisation was"
    " published",
    "mbarrier-overwritten": "a store or copy to the bytes of an mbarrier in use",
    "mbarrier-count": "more arrivals than the mbarrier's count, or an invalid count",
    "mbarrier-tx": "bytes arrived in another phase than the one that expected them, or left over at exit",
    "mbarrier-phase": "an mbarrier went through two phases while a warp still waited for the first",
    "barrier": "a named or cluster barrier used with differing or invalid counts",
    "divergence": "an instruction that needs the whole warp was reached by part of it",
    "mismatch": "operands that must agree across lanes, warps or CTAs do not",
    "tmem-alloc": "TMEM allocation misused: bad size, after relinquish_alloc_permit, not freed, freed twice",
    "pending-at-exit": "a thread or CTA ended with asynchronous copies pending",
    "deadlock": "no warp can advance and nothing asynchronous is pending",
    "descriptor": "a malformed tensor map, matrix descriptor or instruction descriptor",
    "value": "an operand value that the PTX ISA forbids",
}


class EmulatorError(Exception):
    """Base of everything the emulator raises."""


class UnsupportedInstruction(EmulatorError):
    """An instruction, modifier or operand form that the emulator does not know. Never guessed at."""


class Fault(EmulatorError):
    """A rule of the PTX ISA that the kernel broke: `code` is a key of FAULTS, `where` says which
    instruction, CTA and warp."""

    def __init__(self, code: str, message: str):
        assert code in FAULTS, code
        super().__init__(message)
        self.code, self.message, self.where = code, message, ""

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" + (f"\n  {self.where}" if self.where else "")


class Deadlock(Fault):
    """No warp can advance; the message lists what each one waits for."""

    def __init__(self, message: str):
        super().__init__("deadlock", message)
