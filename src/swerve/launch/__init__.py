"""Where the roles of a run live: this package owns launchers, which turn a recipe into processes on machines.

A launcher decides placement, environment and restarts; what a role computes is decided elsewhere.

    recipe, options, site file --> plan --> Launch: a Job per replica --> Launcher --> `swerve launch run FOLDER`
                                            frozen in a folder            hands over     wherever the job ends up
"""

from swerve.launch.job import Job, Launch, freeze, read_ids, read_job, read_launch, record_id
from swerve.launch.launcher import Launcher
from swerve.launch.plan import OPTIONS, Request, plan
from swerve.launch.site import Site, find_site, read_site
from swerve.launch.state import JobState, read_state

__all__ = [
    "OPTIONS",
    "Job",
    "JobState",
    "Launch",
    "Launcher",
    "Request",
    "Site",
    "find_site",
    "freeze",
    "plan",
    "read_ids",
    "read_job",
    "read_launch",
    "read_site",
    "read_state",
    "record_id",
]
