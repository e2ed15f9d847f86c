"""`python -m mstar_core.gateway SPEC`: the keeper of a gateway."""

from mstar_core.gateway.main import main

if __name__ == "__main__":
    main()
