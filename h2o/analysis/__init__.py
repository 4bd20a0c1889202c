"""Analysis of what a model attends to and of what an H2O cache would keep, as in the paper's
observations.

`h2o.analyze(model, **inputs)` measures one text and returns an `Analysis`. The command `h2o
analyze` writes it as a page. `collect` observes a forward pass, `measures` turns scores into
numbers, `removal` removes keys, `result` has the `Analysis`, and `figures` and `page` show it.
"""
