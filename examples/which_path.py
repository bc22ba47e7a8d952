"""Why a call runs as it does: here, and on chips that are not here."""

import torch

import portattn

q = torch.randn(1, 8, 128, 64)
print(portattn.explain("attention", q, q, q, causal=True))

# A plan is a pure function: any machine can be asked about.
problem = portattn.Problem(
    batch=1, heads_q=8, heads_k=8, seq_q=1024, seq_k=1024, head_dim=64, dtype="bf16", causal="bottom_right"
)
for target, toolchain in (
    ("cuda:sm_90", "triton==3.6.0"),
    ("rocm:gfx942", "triton==3.6.0"),
    ("ascend:ascend910b2", "triton-ascend==3.2.0"),
):
    plan = portattn.plan(problem, portattn.target(target, toolchain))
    quirks = ", ".join(quirk.id for quirk in plan.quirks) or "none"
    print(f"{target}: {plan.path}; quirks: {quirks}")
