// Copies the code beside a button. Without it the code is there to be selected, and there is no button.
"use strict";

async function copied(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
  } catch {
    // Not allowed here: selected, it takes one more key.
    getSelection().selectAllChildren(code);
    button.textContent = "selected";
  }
  setTimeout(() => (button.textContent = "copy"), 2000);
}

function offerCopies(part) {
  for (const button of part.querySelectorAll(".code > button")) {
    button.hidden = false;
    button.addEventListener("click", () => copied(button));
  }
}

offerCopies(document);
// What the filter shows comes later.
document.addEventListener("inserted", (event) => offerCopies(event.detail));
