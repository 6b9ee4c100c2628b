"""Attribution: each rounding alone, all but each, and the rank of what was put there to dominate."""

from __future__ import annotations

import pytest

from gdn_kernels.drift.attribution import attribute, ranked, run, variants
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.policy import NKILIB, OURS, UNROUNDED, Roundings

CONFIG = RolloutConfig(H=128, Hk=1, Hv=4, K=16, V=12, tokens=200, policy="nkilib")


def test_variants_are_all_alone_and_without() -> None:
    found = variants(NKILIB)
    sites = set(NKILIB.table) - {"conv_out"}
    assert found[0].policy is NKILIB
    assert {v.site for v in found if v.kind == "alone"} == {v.site for v in found if v.kind == "without"} == sites
    for variant in found[1:]:
        assert (variant.site in variant.policy.table) == (variant.kind == "alone")
        assert len(variant.policy.table) == (1 if variant.kind == "alone" else len(sites) - 1)


def test_the_coarsest_rounding_leads() -> None:
    policy = Roundings("mixed", {"window": "bf16", "delta": "fp8_e4m3", "state": "fp32", "core_out": "bf16"})
    costs = ranked((variant, run(CONFIG, variant)) for variant in variants(policy))
    assert [cost.site for cost in costs] == ["delta", "window", "state", "core_out"]
    assert costs[0].without.state < 0.5 * costs[0].alone.state
    assert sum(cost.share for cost in costs) == pytest.approx(1)
    assert costs[-1].alone.state == 0 < costs[-1].alone.output


def test_a_preset() -> None:
    everything, costs = attribute(CONFIG)
    assert costs[0].site in ("window", "c") and costs[0].share < 0.6
    assert 1e-3 < everything.state < 1e-2
    assert all(cost.without.state <= 1.1 * everything.state for cost in costs)


@pytest.mark.parametrize("policy", [OURS, Roundings("nothing", {})], ids=lambda policy: policy.name)
def test_what_has_no_sites_is_refused(policy: Roundings) -> None:
    with pytest.raises(ValueError, match="policy must round float64 steps somewhere"):
        variants(policy)
    assert variants(UNROUNDED)
