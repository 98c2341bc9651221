"""An MLA transformer in plain torch, and the attentions that it can run with.

``model`` is the architecture, sizes are in ``config``; ``attention`` has plain torch, our kernels
and FlashMLA's behind one signature, ``fake`` the fake-quantised one.
"""
