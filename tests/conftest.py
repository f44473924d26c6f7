"""For all tests: property tests are not timed, as CI's two cores are shared with Slurm daemons and gloo ranks."""

from hypothesis import settings

settings.register_profile("hpcmoe", deadline=None)
settings.load_profile("hpcmoe")
