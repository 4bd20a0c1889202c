"""Analysis of what a model attends to, and of what an H2O cache would keep: the paper's
observations.

`h2o.analyze(model, **inputs)` measures one text and returns an `Analysis`. `h2o analyze` on the
command line makes a page of it. `collect` watches a forward pass, `measures` turns scores into
numbers, `removal` removes keys, `result` answers questions, `figures` and `page` show the
answers.
"""
