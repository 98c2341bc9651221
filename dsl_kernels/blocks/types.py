"""Element types and layout words that kernels of every arch use."""

from __future__ import annotations

import cutlass
import cutlass.tensor_utils

F8, F16, BF16 = cutlass.Float8E4M3FN, cutlass.Float16, cutlass.BFloat16
U8, U16, U32 = cutlass.Uint8, cutlass.Uint16, cutlass.Uint32
ROW_MAJOR = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
