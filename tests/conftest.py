"""Property tests have no deadline: on a busy machine one slow example is no failure."""

from hypothesis import settings

settings.register_profile("echo", deadline=None)
settings.load_profile("echo")
