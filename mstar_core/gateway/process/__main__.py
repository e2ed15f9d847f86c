"""`python -m mstar_core.gateway.process RUN_DIR LISTENER ADMIN READY`: the worker of a gateway."""

from mstar_core.gateway.process.worker import main

if __name__ == "__main__":
    main()
