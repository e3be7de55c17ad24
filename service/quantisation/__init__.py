"""Make another graph of a network's weights, in int8 or float16, and judge it without labels before it may
serve.

    graph.py     the graph
    verdict.py   its masks beside those of the float32 graph, patient by patient, and the limits
    work.py      both, on scans; publishing what passed
    __main__.py  `python -m model_store quantise`
"""
