"""The reader, and a small key-value client: a sans-IO policy under two thin pumps, asyncio and threads."""
