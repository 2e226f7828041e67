"""Call a function of a module with arguments that are JSON, and print what it returns as a
line of JSON: python ask.py MODULE FUNCTION [ARGUMENT ...]
"""

import importlib
import json
import sys

if __name__ == "__main__":
    module, function, *arguments = sys.argv[1:]
    call = getattr(importlib.import_module(module), function)
    print(json.dumps(call(*map(json.loads, arguments))))
