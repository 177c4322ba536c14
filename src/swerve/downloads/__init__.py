"""Files from afar, into a folder that says what they are: this package owns lists of files and their fetching.

A list gives each file's size and digest; it comes from a repository of a Hub at one commit, or from a manifest.
Fetching survives dropped connections and killed processes, goes on where it was, and lets no file appear under its name
before size and digest are right. `download.json` in the folder keeps the list, by which it can be checked offline.
"""

from swerve.downloads.folder import RECORD, Outcome, download, verify
from swerve.downloads.listing import Listing, RemoteFile
from swerve.downloads.sources import HubSource, ManifestSource, Source
from swerve.downloads.web import Web

__all__ = [
    "RECORD",
    "HubSource",
    "Listing",
    "ManifestSource",
    "Outcome",
    "RemoteFile",
    "Source",
    "Web",
    "download",
    "verify",
]
