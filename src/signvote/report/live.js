"use strict";
// Ask the server of this page every two seconds whether a result has changed, and load the page again if one has.
setInterval(async () => {
  try {
    const answer = await fetch("/state");
    if (answer.ok && (await answer.text()) !== SHOWN) location.reload();
  } catch (error) { document.body.classList.add("ended"); }
}, 2000);
