"""generate() with an H2O cache, as transformers loads it by `custom_generate` from a folder or hub.

The import stands in `try` since transformers else advises to install a missing module by its import
name, which on PyPI is another package's.
"""

try:
    import h2o
except ImportError as error:
    install = "pip install '.[hf]' in its source folder"
    raise ImportError(f"{error}; h2o is the import name of h2o-kv: {install}") from error


def generate(model, preset=None, budget=None, **arguments):
    """What `model.generate(**arguments)` returns with a fresh `h2o.H2OCache`.

    preset, budget: as of `H2OConfig.preset`, with `budget_unit` where it is of bytes; without a
    preset the budget is one number for what is recommended (`H2OConfig.budget`). Or among the
    arguments: fields of `H2OConfig` (heavy, recent, sinks, ...), or one as `h2o_config`.
    """
    fields = {x: arguments.pop(x) for x in h2o.H2OConfig.__dataclass_fields__ if x in arguments}
    config = arguments.pop("h2o_config", None)
    if preset is not None:
        config = h2o.H2OConfig.preset(preset, budget, budget_unit=fields.pop("budget_unit", "keys"))
    elif budget is not None:
        fields["budget"] = budget
    with h2o.patched(model, config, **fields):
        return model.generate(**arguments)
