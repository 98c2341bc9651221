"""Error measures: the three of the SnapMLA paper's Figure 4, and the LSE's."""

from snapmla.testing.metrics import lse_error, one_minus_cosine, relative_l2, rmse

__all__ = ["lse_error", "one_minus_cosine", "relative_l2", "rmse"]
