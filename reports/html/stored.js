// Unpacks the data of the page, each part when it is asked for.
"use strict";

async function stored(name) {
  const text = document.getElementById(`stored-${name}`).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(unpacked).json();
}

// All texts of a report stay texts: they get into the document by textContent, onto a canvas, or as what the page's
// maker has escaped.
function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
