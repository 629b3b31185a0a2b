"""Parts of Slipstream that not every run needs: the endpoint, environments of others, the judge of code, servers, bundles, the view
in a browser, Ray.

Guarantee: the core never imports them. It finds them by their entry points (docs/plugins.md), under the names that configurations
and commands have for them. No room here imports another.
"""
