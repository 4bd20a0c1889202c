"""Print the flags that a C program needs to embed this Python with NumPy's headers."""

import sysconfig

import numpy

variables = sysconfig.get_config_vars()
paths = [sysconfig.get_path("include"), numpy.get_include()]
library = f"python{variables['LDVERSION']}"
print(*(f"-I{path}" for path in paths))
print(f"-L{variables['LIBDIR']} -l{library} -Wl,-rpath,{variables['LIBDIR']}")
