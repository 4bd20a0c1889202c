"""What serves Hugging Face transformers: kept apart, so that everything outside needs no model.

`cache` and `layer` hold the keys, `attention` is what a model runs, `patching` switches it on for
code that never names a cache, `simulation` answers a whole text at once as the cache would, with
`variants` of published evaluations; `support` says which models are served, `trace` and `report`
what became of their keys. Users find all of it under `h2o` itself.
"""
