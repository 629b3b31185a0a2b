"""Parts of Slipstream that not every run needs: an endpoint, environments of others, a judge of code, servers, bundles,
relays, the view in a browser, Ray.

Guarantee: the core never imports them. It finds them by their entry points (docs/plugins.md), under the names that configurations
and commands have for them. No room here imports another.
"""
