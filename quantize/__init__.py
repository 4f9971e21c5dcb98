"""Build time: a model in, a folder that `app` can serve out. Never imported by `app`."""
