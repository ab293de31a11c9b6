"""Torch modules inspected, compared and patched; nothing here knows a model or a cache.

Others may use
    module_patch     a module's class or methods replaced, and restored
    hooks            hooks and replaced forwards on a module
    equal_modules    which modules are equal but for their weights
    error_bounds     when a replacement counts as equal to the original module
"""
