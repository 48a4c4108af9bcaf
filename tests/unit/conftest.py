"""Generated examples take the time they take: other work on the machine is no reason to fail."""

from hypothesis import settings

settings.register_profile("shoal", deadline=None, database=None)
settings.load_profile("shoal")
