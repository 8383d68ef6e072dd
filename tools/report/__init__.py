"""Makes the report of check_data: statistics, anchors, tables, figures, pictures and the page."""
