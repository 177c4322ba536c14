"""The program inside a sandbox: standard library only, and nothing of Swerve's outside this folder.

In the default backend it is process 1 of a bubblewrap container whose root is read-only: a warm interpreter that forks
sandboxes (`zygote`). In every other backend it is the only sandbox of a container (`solo`). Both end in `sandbox`,
which runs commands and calls, and is the same everywhere::

    host process                    container (zygote)                 sandbox (fork of the zygote)
    Container  ==control socket==>  Zygote: preloads the harness
                                      | clone into new user, pid, mount, net, ipc, uts namespaces
                                      +--------------------------------> Sandbox: process 1 of its own
    ForkedSandbox  ================one stream socket===================>   pid namespace; runs commands,
                                                                           forks harness calls
    ./run_tests in the sandbox  ---/run/swerve/request (FIFO)---------->   forks `visible_tests`
                                <--/run/swerve/reply (FIFO)-----------

    host process                    container, or a plain process (solo)
    SoloSandbox  ====standard input and output==========================>  Sandbox: preloads the harness itself

The control socket carries one JSON object per packet, a sandbox's stream frames of a 4-byte big-endian length and
JSON. A sandbox ends when its process 1 ends: the kernel then kills whatever else runs in its pid namespace.
"""
