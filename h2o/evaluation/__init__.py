"""Measure what eviction costs on lm-eval's tasks, by simulation or with a real cache.

`h2o eval` is the command line (`h2o.cli.eval_command`). For lm-eval's Python interface, import
`h2o.evaluation.lm`, which registers the model "h2o" with lm-eval.
"""
