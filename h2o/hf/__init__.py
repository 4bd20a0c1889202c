"""What serves Hugging Face transformers: kept apart, so that everything outside needs no model.

`attention` is what a model runs under the name "h2o"; it hands each call (`attention_call`) to a
`layer` of the `cache`, which attends, evicts and stores. `patching` switches it on for code that
never names a cache, `simulation` answers for a whole text at once as the cache would, by way of
`attention_hook`. `support` says which models are served, `kept`, `trace` and `report` what became
of their keys, `cache_file` saves them. Users find all of it under `h2o` itself.
"""
