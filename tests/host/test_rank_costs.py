"""Costs on file: whose block is taken."""

from __future__ import annotations

from snapmla.rank.costs import costs_of


def test_a_cards_own_block_goes_first() -> None:
    """Of others of its architecture the first one, which is the H200's."""
    for own, card in (("H100 SXM", "H100 SXM"), ("H200", "H200"), ("H20", "H200"), ("", "H200")):
        found = costs_of("sparse_decode", "sm_90a", own)
        assert found is not None and found.card.name == card
        dense = costs_of("decode", "sm_90a", own)
        assert dense is not None and dense.card.name == "H200"
    assert costs_of("sparse_decode", "sm_100a", "B200") is None
