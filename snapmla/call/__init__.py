"""One way for every public call: checked, remembered, launched, or traced as one operator.

memo.py         ``Op`` and ``run``: a call that was checked once is recognised and launched
op.py           ``Declared``: an op over tensors and integers, from one declaration
tracing.py      what records or watches calls: ``torch.compile``, FakeTensors, transforms
graph_break.py  a function that ``torch.compile`` runs between two graphs
"""
