import warnings

with warnings.catch_warnings():  # Serve's own models warn when they are first imported
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
