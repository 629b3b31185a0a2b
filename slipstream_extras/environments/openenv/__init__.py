"""Environments of OpenEnv, which are servers of the user's. The entry point `openenv` is `pool.OpenEnvPool`.

Guarantee: the protocol is spoken over aiohttp alone; the package `openenv` is not needed, and none of it runs here.
"""
