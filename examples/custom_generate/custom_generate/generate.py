"""generate() with an H2O cache. transformers loads this file for `custom_generate`.

The `try` around the import replaces transformers' advice for a missing module, which is to install
a package named after the module. On PyPI that name belongs to another package.
"""

try:
    import h2o
except ImportError as error:
    install = "pip install '.[hf]' in its source folder"
    raise ImportError(f"{error}; h2o is the import name of h2o-kv: {install}") from error


def generate(model, preset=None, budget=None, **arguments):
    """Call `model.generate(**arguments)` with a new `h2o.H2OCache`, and return its result.

    Args:
        preset, budget: as for `H2OConfig.preset`. If the budget is in bytes, also pass
            `budget_unit`. Without a preset `budget` is that of the recommended config
            (`H2OConfig.budget`).
        arguments: may also include fields of `H2OConfig` (heavy, recent, sinks, ...), or a whole
            one as `h2o_config`, and `pinned` and `trace` as for `h2o.H2OCache`.
    """
    fields = {x: arguments.pop(x) for x in h2o.H2OConfig.__dataclass_fields__ if x in arguments}
    options = {x: arguments.pop(x) for x in ("pinned", "trace") if x in arguments}
    config = arguments.pop("h2o_config", None)
    if preset is not None:
        how = {} if budget is None else {"budget": budget}
        config = h2o.H2OConfig.preset(preset, budget_unit=fields.pop("budget_unit", "keys"), **how)
    elif budget is not None:
        fields["budget"] = budget
    with h2o.patched(model, config, **options, **fields):
        return model.generate(**arguments)
