"""Plans of merged adapters: their modules, their config, who can load them."""
