"""The dashboard over fake instances with traffic: its pictures, and what it costs."""
