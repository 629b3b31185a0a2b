// A button with `data-compute` has the server compute what it names, and shows the page again when that is there.
"use strict";
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-compute]");
  if (!button || button.disabled) return;
  const said = document.getElementById(button.getAttribute("aria-controls"));
  button.disabled = true;
  said.textContent = "Computing: the base model is loaded first, which may take a minute ...";
  try {
    const { problem } = await (await fetch(button.dataset.compute)).json();
    if (!problem) return location.reload();
    said.textContent = problem;
  } catch (error) {
    said.textContent = "rl-view does not answer any more; start it again.";
  }
  button.disabled = false;
});
