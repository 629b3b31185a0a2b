// Keys: one that an element names in `data-key` follows it, or puts the cursor there.
"use strict";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") document.activeElement.blur();
  if (event.target.closest("input, select, textarea")) return;
  if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
  const wanted = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (!wanted) return;
  event.preventDefault();
  if (wanted.matches("input")) wanted.focus();
  else wanted.click();
});
