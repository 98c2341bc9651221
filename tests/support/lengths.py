"""Lengths of sequences that plans are tried with."""

from __future__ import annotations

from hypothesis import strategies as st

many_lengths = st.lists(
    st.one_of(
        st.integers(-5, 200), st.integers(0, 40000), st.sampled_from([0, 1, 63, 64, 65, 2**31 - 1])
    ),
    min_size=1,
    max_size=70,
)
