"""Each rule that the emulator checks, broken by a few lines of PTX; and the same lines with the rule kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import emulator

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<40>; .reg .b64 %d<20>;\n"


def kernel(body: str, params: str = ".param .u64 out", shared: str = "", target: str = "sm_90a") -> str:
    header = HEADER.replace("sm_90a", target)
    return f"{header}{shared}\n.visible .entry k({params})\n{{\n{REGISTERS}{body}\nret;\n}}\n"


SMEM = ".shared .align 1024 .b8 buffer[8192];"
# d0 = address of out[tid], r0 = tid
OUT = """ld.param.b64 %d1, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; add.s64 %d0, %d1, %d2;
"""


def run(
    body: str,
    *,
    out: torch.Tensor | None = None,
    seeds=(0, 1, 2),
    shared=SMEM,
    target="sm_90a",
    **launch: Any,
):
    """The results over several seeds, or the fault."""
    out = torch.zeros(256, dtype=torch.int32) if out is None else out
    block = launch.pop("block", (64, 1, 1))
    result = None
    for seed in seeds:
        result = emulator.run_ptx(
            kernel(OUT + body, shared=shared, target=target), out, block=block, seed=seed, **launch
        )
    assert result is not None
    return out, result


def fault(body: str, code: str, **options) -> emulator.Fault:
    """The fault that some seed finds; its place names kernel, warp and instruction."""
    error = next((e for e in (_outcome(body, seed, options) for seed in range(6)) if e is not None), None)
    assert error is not None, f"no seed found [{code}]"
    assert error.code == code, error
    assert "kernel k" in error.where or error.code in ("deadlock", "mbarrier-tx"), error.where
    return error


def _outcome(body: str, seed: int, options: dict) -> emulator.Fault | None:
    try:
        run(body, seeds=(seed,), **options)
    except emulator.Fault as error:
        return error
    return None


# ---- memory


def test_global_bounds_name_the_nearest_tensor():
    error = fault("st.global.b32 [%d0+1024], %r0;", "global-bounds")
    assert "argument 0" in error.message
    assert "st.global.b32" in error.where
    assert "warp" in error.where


def test_reading_a_parameter_beyond_its_end():
    fault(
        "cvta.param.u64 %d3, %d1; mov.b64 %d4, out; cvta.param.u64 %d5, %d4; ld.b32 %r1, [%d5+8];",
        "global-bounds",
    )


def test_misaligned_access():
    fault("add.s64 %d0, %d0, 2; st.global.b32 [%d0], %r0;", "misaligned")


def test_shared_bounds():
    fault("mov.b32 %r1, buffer; st.shared.b32 [%r1+300000], %r0;", "shared-bounds")


def test_uninitialised_shared_memory_even_if_max_would_drop_a_nan():
    fault("mov.b32 %r1, buffer; ld.shared.b32 %f1, [%r1]; max.f32 %f2, %f1, 0f00000000;", "uninit-shared")


def test_uninitialised_register_is_found_when_used_and_may_be_copied():
    assert "%r7" in fault("mov.b32 %r8, %r9; add.s32 %r1, %r7, 1;", "uninit-register").message
    run("mov.b32 %r8, %r9;")


def test_uninitialised_register_in_some_lanes():
    body = "setp.lt.u32 %p1, %r0, 40; @%p1 mov.b32 %r1, 5; {} st.global.b32 [%d0], %r1;"
    assert "lanes [8, 9" in fault(body.format(""), "uninit-register").message
    out, _ = run(body.format("@!%p1 mov.b32 %r1, 6;"))
    assert out[39] == 5
    assert out[40] == 6


def test_selp_needs_only_the_selected_source():
    out, _ = run(
        "setp.ge.u32 %p1, %r0, 0; mov.b32 %r1, 3; selp.b32 %r2, %r1, %r9, %p1; st.global.b32 [%d0], %r2;"
    )
    assert (out[:64] == 3).all()
    fault("setp.lt.u32 %p1, %r0, 9; mov.b32 %r1, 3; selp.b32 %r2, %r1, %r9, %p1;", "uninit-register")


def test_store_visible_to_another_warp_only_through_a_barrier():
    body = """mov.b32 %r1, buffer; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; st.shared.b32 [%r3], %r0; {}
    xor.b32 %r4, %r2, 128; add.s32 %r5, %r1, %r4; ld.shared.b32 %r6, [%r5]; st.global.b32 [%d0], %r6;"""
    out, _ = run(body.format("bar.sync 0;"))
    assert torch.equal(out[:64], torch.arange(64, dtype=torch.int32) ^ 32)
    with pytest.raises(emulator.Fault, match=r"stale-read|uninit-shared"):
        run(body.format(""))


# ---- barriers and control flow


def test_deadlock_says_what_each_warp_waits_for():
    error = fault("setp.ge.u32 %p1, %r0, 32; @%p1 bar.sync 3, 64;", "deadlock")
    assert "warp 1: waits at barrier 3 (32 of 64 threads" in error.message


def test_named_barrier_counts_must_agree():
    fault("setp.ge.u32 %p1, %r0, 32; @%p1 bar.sync 3, 64; @!%p1 bar.sync 3, 96;", "barrier")


def test_polling_for_ever_is_a_deadlock(monkeypatch):
    from tests.emulator import machine

    monkeypatch.setattr(machine, "STALL_LIMIT", 2000)
    fault("again: ld.relaxed.gpu.global.b32 %r1, [%d0]; setp.eq.s32 %p1, %r1, 0; @%p1 bra again;", "deadlock")


def test_divergent_lanes_join_again_and_shuffles_wait_for_them():
    body = """and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; mov.b32 %r2, %r0;
    @%p1 bra even; add.s32 %r2, %r2, 100; bra join; even: add.s32 %r2, %r2, 200; join:
    shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1; st.global.b32 [%d0], %r3;"""
    out, _ = run(body)
    lane = torch.arange(64, dtype=torch.int32)
    assert torch.equal(out[:64], (lane ^ 1) + torch.where(lane % 2 == 1, 200, 100).int())


def test_shuffle_without_all_lanes():
    fault(
        "and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 0; @%p1 shfl.sync.idx.b32 %r2, %r0, 0, 31, -1;",
        "divergence",
    )


EXCHANGES = [
    "shfl.sync.idx.b32 %r2|%p3, %r0, 0, 31, {};",
    "vote.sync.any.pred %p3, %p2, {};",
    "vote.sync.all.pred %p3, %p2, {};",
    "vote.sync.ballot.b32 %r2, %p2, {};",
    "redux.sync.add.s32 %r2, %r0, {};",
    "redux.sync.min.u32 %r2, %r0, {};",
]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("mask", "code"),
    [("-1", "divergence"), ("0x7fff", "divergence"), ("0x1ffff", "divergence"), ("%r0", "mismatch")],
    ids=["all", "not oneself", "one who is absent", "differs"],
)
def test_membermask_that_is_not_of_the_lanes_that_execute(exchange, mask, code):
    body = "and.b32 %r1, %r0, 31; setp.lt.u32 %p1, %r1, 16; setp.ne.u32 %p2, %r1, 3; @%p1 "
    run(body + exchange.format("0xffff"))
    fault(body + exchange.format(mask), code)


MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;"


@pytest.mark.parametrize(
    "body",
    [
        "setp.lt.u32 %p1, %r0, 63; @%p1 " + MOVMATRIX,
        "setp.eq.u32 %p1, %r0, 5; @%p1 exit; " + MOVMATRIX,
        "setp.eq.u32 %p1, %r0, 5; @%p1 bra other; " + MOVMATRIX + "bra end; other: " + MOVMATRIX + "end:",
    ],
    ids=["a predicate", "an exit", "a branch"],
)
def test_movmatrix_without_all_lanes(body):
    fault(body, "divergence")


def test_movmatrix_of_a_register_that_a_lane_never_wrote():
    fault(
        "setp.ne.u32 %p1, %r0, 5; @%p1 mov.b32 %r2, 1;" + MOVMATRIX.replace("%r0", "%r2"), "uninit-register"
    )


def test_lanes_waiting_for_each_other_at_different_places():
    body = """setp.eq.u32 %p1, %r0, 0; @%p1 bra other; shfl.sync.idx.b32 %r2, %r0, 0, 31, -1; bra end;
    other: shfl.sync.idx.b32 %r3, %r0, 0, 31, -1; end:"""
    fault(body, "divergence")


def test_setmaxnreg_waits_for_registers_that_nobody_frees():
    body = (
        "setp.lt.u32 %p1, %r0, 128; @%p1 bra low; setmaxnreg.inc.sync.aligned.u32 240; bra end; low: {} end:"
    )
    fault(body.format("bar.sync 1, 128;"), "deadlock", block=(384, 1, 1))
    run(body.format("setmaxnreg.dec.sync.aligned.u32 24;"), block=(384, 1, 1))


# ---- mbarriers


INIT = """mov.b32 %r1, buffer; setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r1], {count}; fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = """{ .reg .pred P; again: mbarrier.try_wait.parity.shared.b64 P, [%r1], 0;
@P bra done; bra again; done: }
"""


def test_mbarrier_round():
    run(INIT.format(count=64) + "mbarrier.arrive.shared.b64 %d3, [%r1];" + WAIT)


def test_mbarrier_used_before_init():
    fault("mov.b32 %r1, buffer; mbarrier.arrive.shared.b64 %d3, [%r1];", "mbarrier-init")


def test_mbarrier_arrivals_past_the_count():
    fault(INIT.format(count=40) + "mbarrier.arrive.shared.b64 %d3, [%r1], 30;", "mbarrier-count")


def test_storing_to_an_mbarrier():
    fault(INIT.format(count=1) + "@%p1 st.shared.b32 [%r1+4], %r0;", "mbarrier-overwritten")
    run(INIT.format(count=1) + "@%p1 mbarrier.inval.shared.b64 [%r1]; @%p1 st.shared.b32 [%r1+4], %r0;")


def test_overwriting_what_another_warp_may_still_read():
    body = """mov.b32 %r1, buffer; setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p2, %r0, 32; mov.b32 %r5, 7;
    @%p1 st.shared.b32 [%r1], %r5; bar.sync 0; @%p2 ld.shared.b32 %r2, [%r1]; {}
    @%p1 st.shared.b32 [%r1], %r5;"""
    run(body.format("bar.sync 0;"))
    fault(body.format(""), "stale-read")


def test_mbarrier_with_missing_arrivals():
    error = fault(INIT.format(count=65) + "mbarrier.arrive.shared.b64 %d3, [%r1];" + WAIT, "deadlock")
    assert "1 of 65 arrivals pending" in error.message


def test_mbarrier_bytes_that_never_come():
    body = INIT.format(count=1) + "@%p1 mbarrier.arrive.expect_tx.shared.b64 %d3, [%r1], 64;" + WAIT
    assert "64 bytes more are expected" in fault(body, "mbarrier-tx").message


def test_mbarrier_phase_overrun():
    # Warp 1 may still wait for phase 0 when warp 0 has completed phases 0 and 1.
    body = (
        INIT.format(count=1)
        + "@%p1 mbarrier.arrive.shared.b64 %d3, [%r1]; @%p1 mbarrier.arrive.shared.b64 %d3, [%r1];"
    )
    body += "setp.lt.u32 %p2, %r0, 32; @%p2 bra over;" + WAIT + "over:"
    codes = {e.code for e in (_outcome(body, seed, {}) for seed in range(30)) if e is not None}
    assert "mbarrier-phase" in codes
    assert codes <= {"mbarrier-phase", "deadlock"}


CP_ASYNC = (
    INIT.format(count=64)
    + """shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, 1024; add.s32 %r3, %r3, %r2; and.b32 %r4, %r0, 4;
    cp.async.ca.shared.global [%r3], [%d0], 4, %r4; {arrive} {wait}
    xor.b32 %r5, %r2, 128; add.s32 %r5, %r5, %r1; ld.shared.b32 %r6, [%r5+1024];
    st.global.b32 [%d0+256], %r6;"""
)
ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"


def test_cp_async_completes_at_an_mbarrier():
    """Each thread copies a number, or zeros where its source is 0 bytes long, for one of the other warp."""
    source = torch.arange(1, 257, dtype=torch.int32)
    out, ran = run(CP_ASYNC.replace("{arrive}", ARRIVE).replace("{wait}", WAIT), out=source.clone())
    thread = torch.arange(64) ^ 32
    assert torch.equal(out[64:128], torch.where(thread & 4 != 0, source[thread], 0))
    assert ran.counters["bytes copied by cp.async"] == 32 * 4


def test_cp_async_read_too_early():
    fault(CP_ASYNC.replace("{arrive}", ARRIVE).replace("{wait}", "bar.sync 0;"), "stale-read")
    fault(CP_ASYNC.replace("{arrive}", "").replace("{wait}", WAIT), "deadlock")


# ---- asynchronous copies without tensor maps


def bulk(
    between: str = "",
    fence: str = "fence.proxy.async.shared::cta;",
    wait: str = "cp.async.bulk.wait_group.read 0;",
):
    """Warp 0 fills a buffer and lane 0 stores it with a bulk copy; `between` comes right after the copy."""
    return f"""mov.b32 %r1, buffer; setp.lt.u32 %p2, %r0, 32; @!%p2 bra end;
    shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; st.shared.b32 [%r3], %r0; {fence} bar.warp.sync -1;
    setp.eq.u32 %p1, %r0, 0; @!%p1 bra end;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128; cp.async.bulk.commit_group; {between}
    {wait} end:"""


def test_bulk_store():
    out, result = run(bulk())
    assert torch.equal(out[:32], torch.arange(32, dtype=torch.int32))
    assert result.counters["bytes stored by bulk copies"] == 128


def test_missing_proxy_fence():
    fault(bulk(fence=""), "missing-proxy-fence")


def test_bulk_source_overwritten_before_it_was_read():
    fault(bulk(between="mov.b32 %r9, 7; st.shared.b32 [%r1], %r9;"), "async-overlap")


def test_exit_with_a_pending_copy():
    fault(bulk(wait=""), "pending-at-exit")
    _, result = run(bulk(wait=""), ignore={"pending-at-exit"})
    assert any("pending-at-exit" in w for w in result.warnings)


def test_bulk_load_read_before_its_bytes_arrived():
    body = (
        INIT.format(count=1)
        + """add.s32 %r5, %r1, 1024;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d3, [%r1], 64;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%d1], 64, [%r1];
    {wait} and.b32 %r6, %r0, 15; shl.b32 %r6, %r6, 2; add.s32 %r6, %r5, %r6; ld.shared.b32 %r7, [%r6];
    st.global.b32 [%d0+256], %r7;"""
    )
    source = torch.arange(256, dtype=torch.int32)
    out, _ = run(body.replace("{wait}", WAIT), out=source)
    assert torch.equal(out[64:128], torch.arange(64, dtype=torch.int32) % 16)
    error = fault(body.replace("{wait}", ""), "stale-read")
    assert "mbarrier" in error.message


def test_bytes_of_another_phase():
    # 128 bytes are copied, 64 of them expected: the barrier's phase ends with the first copy.
    copy = (
        "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5+{}], [%d1], 64, [%r1];"
    )
    body = INIT.format(count=1) + "add.s32 %r5, %r1, 1024;" + copy.format(0) + copy.format(64)
    body += "@%p1 mbarrier.arrive.expect_tx.shared.b64 %d3, [%r1], 64;" + WAIT
    fault(body, "mbarrier-tx")


# ---- clusters


def test_remote_arrival_at_an_unpublished_mbarrier():
    body = (
        """mov.b32 %r1, buffer; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 1; {fence}
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; mapa.shared::cluster.u32 %r4, %r1, %r3;
    @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r4];"""
        + WAIT
        + "barrier.cluster.arrive; barrier.cluster.wait;"
    )
    shape: dict[str, Any] = dict(grid=(2, 1, 1), cluster=(2, 1, 1), block=(32, 1, 1))
    run(body.replace("{fence}", "fence.mbarrier_init.release.cluster;"), **shape)
    fault(body.replace("{fence}", ""), "mbarrier-init", **shape)


def test_touching_a_cta_that_has_ended():
    body = """mov.b32 %r1, buffer; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1;
    st.shared.b32 [%r1], %r2; barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r4, %r1, %r3; ld.shared::cluster.b32 %r5, [%r4]; {}"""
    shape: dict[str, Any] = dict(grid=(2, 1, 1), cluster=(2, 1, 1), block=(32, 1, 1))
    run(body.format("barrier.cluster.arrive; barrier.cluster.wait;"), **shape)
    fault(body.format(""), "pending-at-exit", **shape)


@pytest.mark.parametrize("resident", [1, 5, 40])
def test_cluster_launch_control_gives_each_block_to_somebody_once(resident):
    body = (
        INIT.format(count=1)
        + """add.s32 %r9, %r1, 64; mov.u32 %r10, %ctaid.x; mov.b32 %r11, 0;
    work: @%p1 mul.wide.u32 %d3, %r10, 4; @%p1 add.s64 %d4, %d1, %d3;
    @%p1 red.relaxed.gpu.global.add.u32 [%d4], 1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d5, [%r1], 16;
    @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r9], [%r1];
    { .reg .pred P; again: mbarrier.try_wait.parity.shared.b64 P, [%r1], %r11; @P bra done; bra again; done: }
    ld.shared.v2.b64 {%d6, %d7}, [%r9]; bar.sync 0; xor.b32 %r11, %r11, 1;
    { .reg .b128 response; mov.b128 response, {%d6, %d7};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, response;
    @%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r10, response; }
    @%p3 bra work;"""
    )
    for seed in range(3):
        out, result = run(body, seeds=(seed,), target="sm_100a", grid=(40, 1, 1), resident=resident)
        assert out.tolist() == [1] * 40 + [0] * 216
        assert result.counters["clusterlaunchcontrol.try_cancel"] == 40


# ---- TMEM

ALLOC = """mov.b32 %r1, buffer; setp.lt.u32 %p1, %r0, 32;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; bar.sync 0; ld.shared.b32 %r2, [%r1];
shr.u32 %r3, %r0, 5; shl.b32 %r3, %r3, 21; add.s32 %r3, %r2, %r3;
"""
FREE = "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;"


def tmem(body: str) -> str:
    return ALLOC + body


def test_tmem_round_trip():
    body = """tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3+5], {%r0}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3+5]; tcgen05.wait::ld.sync.aligned;
    st.global.b32 [%d0], %r4;"""
    out, _ = run(tmem(body + FREE), target="sm_100a", block=(128, 1, 1))
    assert torch.equal(out[:128], torch.arange(128, dtype=torch.int32))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", "tmem-alloc"),
        ("@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;" + FREE, "tmem-alloc"),
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3]; tcgen05.wait::ld.sync.aligned;" + FREE,
            "uninit-tmem",
        ),
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3+64], {%r0};" + FREE, "tmem-bounds"),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0}; tcgen05.wait::st.sync.aligned;" + FREE,
            "tmem-bounds",
        ),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r0}; tcgen05.wait::st.sync.aligned;"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3]; st.global.b32 [%d0], %r4;" + FREE,
            "tcgen05-wait-ld",
        ),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r0};"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3]; tcgen05.wait::ld.sync.aligned;" + FREE,
            "async-overlap",
        ),
    ],
    ids=[
        "not freed",
        "alloc after relinquish",
        "unwritten",
        "columns",
        "another warp's lanes",
        "no wait::ld",
        "no wait::st",
    ],
)
def test_tmem_faults(body, code):
    fault(tmem(body), code, target="sm_100a", block=(128, 1, 1))


WRITTEN = "".join(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3+{i}], {{%r0}};" for i in range(8))
HALF_LOAD = "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r4, %r5, %r6, %r7}, [%r3+"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (WRITTEN + "{wait}" + HALF_LOAD + "0]; st.global.b32 [%d0], %r6;", "tcgen05-wait-ld"),
        (WRITTEN + "{wait}" + HALF_LOAD + "0]; mov.b32 %r7, 0;", "tcgen05-wait-ld"),
        (WRITTEN + "{wait}" + HALF_LOAD + "0];", "pending-at-exit"),
        (WRITTEN + HALF_LOAD + "0]; tcgen05.wait::ld.sync.aligned;", "async-overlap"),
        (WRITTEN + "{wait}" + HALF_LOAD + "1]; tcgen05.wait::ld.sync.aligned;", "uninit-tmem"),
        (WRITTEN + "{wait}" + HALF_LOAD + "57];", "tmem-bounds"),
        (WRITTEN + "{wait}" + HALF_LOAD + "524288];", "misaligned"),
        (WRITTEN + "{wait}" + HALF_LOAD + "2097152];", "tmem-bounds"),
        (WRITTEN + "{wait} add.s32 %r3, %r3, %r0;" + HALF_LOAD + "0];", "mismatch"),
        (WRITTEN + "{wait} setp.ne.u32 %p4, %r0, 7; @%p4 " + HALF_LOAD + "0];", "divergence"),
        (WRITTEN + "{wait} setp.eq.u32 %p4, %r0, 7; @%p4 exit;" + HALF_LOAD + "0];", "divergence"),
        (
            WRITTEN
            + "{wait}"
            + HALF_LOAD
            + "0]; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r0}; tcgen05.wait::ld.sync.aligned;",
            "async-overlap",
        ),
    ],
    ids=[
        "read before wait::ld",
        "overwritten before wait::ld",
        "exit before wait::ld",
        "no wait::st",
        "unwritten",
        "columns",
        "lane 8",
        "another warp's lanes",
        "address differs",
        "a predicate",
        "an exit",
        "stored over before wait::ld",
    ],
)
def test_faults_of_tcgen05_ld_16x256b(body, code):
    body = body.replace("{wait}", "tcgen05.wait::st.sync.aligned;")
    fault(tmem(body + FREE), code, target="sm_100a", block=(128, 1, 1))


def test_tcgen05_ld_16x256b_of_the_second_half_of_the_lanes():
    body = WRITTEN + "tcgen05.wait::st.sync.aligned;" + HALF_LOAD + "1048576]; tcgen05.wait::ld.sync.aligned;"
    out, _ = run(tmem(body + "st.global.b32 [%d0], %r6;" + FREE), target="sm_100a", block=(128, 1, 1))
    thread = torch.arange(128, dtype=torch.int32)
    assert torch.equal(out[:128], thread // 32 * 32 + 16 + 8 + thread % 32 // 4)


# Warps 0 to 3 write TMEM, then warps 4 to 7, of the same lanes, read it. In some bodies they write it again.
WRITE = "@%p2 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3+5], {%r0}; tcgen05.wait::st.sync.aligned;"
READ = "@!%p2 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3+5]; tcgen05.wait::ld.sync.aligned;"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
BARRIER = "bar.sync 0;"
TWO_GROUPS = ALLOC + "and.b32 %r3, %r3, 0x600000; add.s32 %r3, %r3, %r2; setp.lt.u32 %p2, %r0, 128;"
RELAXED_INIT = "@%p1 mbarrier.init.shared.b64 [%r1+64], 256; fence.mbarrier_init.release.cluster; bar.sync 0;"
RELAXED = """{before} mbarrier.arrive.relaxed.cta.shared.b64 _, [%r1+64];
{{ .reg .pred P; again: mbarrier.try_wait.parity.relaxed.cta.shared.b64 P, [%r1+64], 0;
@P bra done; bra again; done: }} {after}"""


def between_groups(*parts: str) -> str:
    return TWO_GROUPS + "".join(parts) + FREE


GROUPS: dict[str, Any] = dict(target="sm_100a", block=(256, 1, 1))


def test_tcgen05_operations_of_two_threads_ordered_by_fences_and_a_barrier():
    result = "@!%p2 st.global.b32 [%d0], %r4;"
    out, ran = run(between_groups(WRITE, BEFORE, BARRIER, AFTER, READ, result), **GROUPS)
    assert torch.equal(out[128:], torch.arange(128, dtype=torch.int32))
    assert not ran.warnings
    run(between_groups(WRITE, BEFORE, BARRIER, AFTER, READ, BEFORE, BARRIER, AFTER, WRITE), **GROUPS)
    run(between_groups(RELAXED_INIT, WRITE, RELAXED.format(before=BEFORE, after=AFTER), READ), **GROUPS)


def test_a_fence_reaches_across_barriers_of_others():
    run(between_groups(WRITE, BEFORE, BARRIER, BARRIER, AFTER, READ), **GROUPS)
    run(between_groups(WRITE, BEFORE, BARRIER, AFTER, "bar.sync 1, 256;", READ), **GROUPS)


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ((WRITE, BARRIER, AFTER, READ), "before_thread_sync"),
        ((WRITE, BEFORE, BARRIER, READ), "after_thread_sync"),
        ((WRITE, BARRIER, BEFORE, AFTER, READ), "before_thread_sync"),
        ((WRITE, BEFORE, AFTER, BARRIER, READ), "after_thread_sync"),
        ((WRITE, BEFORE, BARRIER, AFTER, READ, BARRIER, AFTER, WRITE), "before_thread_sync"),
        ((WRITE, BEFORE, BARRIER, AFTER, READ, BEFORE, BARRIER, WRITE), "after_thread_sync"),
    ],
    ids=["before", "after", "before too late", "after too early", "before a write", "after a read"],
)
def test_missing_tcgen05_fence(parts, missing):
    body = between_groups(*parts)
    for seed in range(6):
        error = _outcome(body, seed, GROUPS)
        assert error is not None
        assert (error.code, missing in error.message) == ("tcgen05-fence", True), error
    _, ran = run(body, ignore={"tcgen05-fence"}, **GROUPS)
    assert any("tcgen05-fence" in w for w in ran.warnings)


@pytest.mark.parametrize(("before", "after"), [("", AFTER), (BEFORE, "")])
def test_relaxed_arrivals_order_tcgen05_by_fences_only(before, after):
    body = between_groups(RELAXED_INIT, WRITE, RELAXED.format(before=before, after=after), READ)
    fault(body, "async-overlap", **GROUPS)


# Each CTA allocates, counts itself in out[0], and waits until out[0] says 2.
MEET = """again: ld.relaxed.gpu.global.b32 %r5, [%d1]; setp.lt.u32 %p3, %r5, 2; @%p3 bra again;"""
TWO_CTAS = """mov.b32 %r1, buffer; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {columns};
{relinquish} ld.shared.b32 %r2, [%r1]; setp.eq.u32 %p1, %r0, 0;
@%p1 red.relaxed.gpu.global.add.u32 [%d1], 1; {meet}
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, {columns};"""
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"


@pytest.mark.parametrize(
    ("columns", "relinquish", "meet", "per_sm", "why"),
    [
        (256, RELINQUISH, MEET, 2, ""),
        (256, "", MEET, 2, "has the permit"),
        (256, "", "", 2, ""),
        (256, "", MEET, 1, ""),
        (512, RELINQUISH, MEET, 2, "0 are free"),
        (512, RELINQUISH, "", 2, ""),
    ],
    ids=["both", "permit kept", "take turns", "an SM each", "no room", "room in turns"],
)
def test_ctas_of_an_sm_share_its_tensor_memory(columns, relinquish, meet, per_sm, why, monkeypatch):
    from tests.emulator import machine

    monkeypatch.setattr(machine, "STALL_LIMIT", 2000)
    monkeypatch.setattr(machine, "STRETCHES", (1, 4, 30, 200))  # a polling warp would use up the longest
    body = TWO_CTAS.format(columns=columns, relinquish=relinquish, meet=meet)
    shape: dict[str, Any] = dict(target="sm_100a", grid=(2, 1, 1), block=(32, 1, 1), per_sm=per_sm)
    for seed in range(6):
        if why:
            with pytest.raises(emulator.Fault, match=why) as error:
                run(body, seeds=(seed,), **shape)
            assert error.value.code == "deadlock"
        else:
            assert run(body, seeds=(seed,), **shape)[0][0] == 2


# ---- what is not known is refused


@pytest.mark.parametrize(
    "instruction",
    [
        "frobnicate.b32 %r1, %r0;",
        "add.s32.saturate %r1, %r0, 1;",
        "ld.global.unheard_of.b32 %r1, [%d0];",
        "mbarrier.try_wait.sideways.shared.b64 %p1, [%r1], 0;",
        "tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %d1, %d2, %r2, %p1;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f0,%f1,%f2,%f3}, %d1, %d2, %p1, 1, 1;",
        "wgmma.mma_async.sync.aligned.m64n4k16.f32.f16.f16 {%f0,%f1}, %d1, %d2, %p1, 1, 1, 0, 0;",
        "movmatrix.sync.aligned.m8n8.b16 %r1, %r0;",
        "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r1,%r2}, [%r0];",
        "tcgen05.ld.sync.aligned.16x128b.x1.b32 {%r1,%r2}, [%r0];",
        "tcgen05.st.sync.aligned.16x256b.x1.b32 [%r0], {%r1,%r2,%r3,%r4};",
    ],
)
def test_unknown_instructions_and_modifiers_are_refused_before_anything_runs(instruction):
    with pytest.raises(emulator.UnsupportedInstruction, match=r"line \d+"):
        run("mov.b32 %r1, 0; bra end;" + instruction + "end:")


def test_ignored_codes_must_exist():
    with pytest.raises(emulator.EmulatorError, match="no-such-rule"):
        run("", ignore={"no-such-rule"})


@pytest.mark.parametrize(
    "access",
    [
        "ld.global.u32 %r1, [%d0];",
        "st.global.u32 [%d0], %r0;",
        "red.global.add.u32 [%d0], %r0;",
    ],
)
def test_global_memory_before_the_launch_before_has_ended(access):
    wait = "griddepcontrol.wait;"
    fault(access + wait, "launch-order", pdl=True)
    fault(f"setp.lt.u32 %p1, %r0, 32; @%p1 {wait}" + access, "launch-order", pdl=True)
    fault(f"setp.ne.u32 %p1, %r0, 5; @%p1 {wait}" + access, "launch-order", pdl=True)
    run(wait + access, pdl=True)
    run(access)


BULK_LOAD = """@%p1 mbarrier.arrive.expect_tx.shared.b64 %d3, [%r1], 16;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%d1], 16, [%r1];
"""
BULK_STORE = """@%p1 st.shared.v4.b32 [%r1+1024], {%r0, %r0, %r0, %r0};
fence.proxy.async.shared::cta; bar.sync 0;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1+1024], 16;
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
"""


@pytest.mark.parametrize("access", [BULK_LOAD, BULK_STORE], ids=["load", "store"])
def test_a_bulk_copy_before_the_launch_before_has_ended(access):
    fault(INIT.format(count=1) + access + "griddepcontrol.wait;", "launch-order", pdl=True)
    run(
        INIT.format(count=1) + "griddepcontrol.wait;" + access + (WAIT if "mbarrier" in access else ""),
        pdl=True,
    )


def test_a_launch_that_does_not_wait_may_end_before_the_launch_before():
    fault("griddepcontrol.launch_dependents;", "launch-order", pdl=True)
    run("griddepcontrol.launch_dependents;")


def test_operands_that_lanes_must_share():
    fault("bar.sync %r0, 64;", "mismatch")


def test_something_that_is_not_a_tensor_map():
    body = (
        INIT.format(count=1)
        + """@%p1 mbarrier.arrive.expect_tx.shared.b64 %d3, [%r1], 128;
    @%p1 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1+1024], [%d1, {%r0}], [%r1];"""
    )
    aligned = torch.full((256,), -1, dtype=torch.int32)
    where = aligned.data_ptr() % 64 // 4
    assert where % 16 == 0, "torch aligns its tensors to 64 bytes"
    fault(body, "descriptor", out=aligned)


def test_a_wgmma_descriptor_that_is_not_modelled():
    body = """mov.b64 %d7, 562949953421312; mov.b32 %f0, 0f00000000; mov.b32 %f1, %f0; mov.b32 %f2, %f0;
    mov.b32 %f3, %f0; setp.ne.b32 %p2, 0, 0; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %d7, %d7, %p2, 1, 1, 0, 0;"""
    fault(body, "descriptor", block=(128, 1, 1))


def test_every_code_is_raised_somewhere():
    """The table of faults promises nothing that no file raises."""
    from pathlib import Path

    folder = Path(emulator.__file__).parent
    sources = "".join(p.read_text() for p in folder.rglob("*.py") if p.name != "faults.py")
    assert [code for code in emulator.FAULTS if f'"{code}"' not in sources and code != "deadlock"] == []
