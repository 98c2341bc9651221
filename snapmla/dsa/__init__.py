"""A step of DeepSeek's sparse attention (DSA) before attention itself.

select.py   ``select_topk``: the k highest scores of each row, as positions or cache slots
shapes.py   which kernel serves a shape
"""

from snapmla.dsa.select import select_topk

__all__ = ["select_topk"]
