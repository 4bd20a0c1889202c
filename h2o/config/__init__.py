"""Cache configuration: `H2OConfig`, its presets, profiles, and the plan for one layer of a model.

This package imports neither torch nor transformers, so that command lines, result files and tests
can use it without loading a model.
"""

from h2o.budgets import UNLIMITED as UNLIMITED
from h2o.config.h2o_config import PARAMETERS as PARAMETERS
from h2o.config.h2o_config import H2OConfig as H2OConfig
from h2o.config.h2o_config import check_config as check_config
from h2o.config.h2o_config import resolve_config as resolve_config
from h2o.config.presets import PRESETS as PRESETS
