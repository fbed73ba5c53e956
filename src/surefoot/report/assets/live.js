// A live page requests the sections that changed since its last request, and draws those.

const PAUSE_MS = 1000;
const MOST_PAUSE_MS = 15000;

let cursor = null;
let lastNews = 0;

// A killed run logs no end: after a minute without new data, the page shows for how long.
function showSilence() {
  const minutes = Math.floor((performance.now() - lastNews) / 60000);
  const badge = document.getElementById("live");
  if (data.head.state === "running" && minutes >= 1) badge.textContent = `running, no new data for ${minutes} min`;
}

async function ask() {
  const began = performance.now();
  const answer = await fetch(`/data?since=${encodeURIComponent(cursor ?? data.cursor ?? "")}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const news = await answer.json();
  cursor = news.cursor;
  if (Object.keys(news.sections).length) {
    Object.assign(data, news.sections);
    drawSections(Object.keys(news.sections));
    lastNews = performance.now();
  }
  showSilence();
  return performance.now() - began;
}

async function follow() {
  let pause = PAUSE_MS;
  for (;;) {
    await new Promise((resume) => setTimeout(resume, pause));
    if (document.hidden) continue; // the page is not visible: the next request catches up
    try {
      // Reading a long run takes the server a while: it is asked less often, so that reading takes at most a fifth of its time.
      pause = Math.min(Math.max((await ask()) * 5, PAUSE_MS), MOST_PAUSE_MS);
    } catch (error) {
      pause = Math.min(pause * 2, MOST_PAUSE_MS);
      const badge = document.getElementById("live");
      if (badge) {
        badge.textContent = "no connection";
        badge.title = String(error.message);
        badge.className = "live gone";
      }
      document.title = `No connection · ${data.head.script.split("/").pop()}`;
    }
  }
}

globalThis.surefoot = { view, zoomTo, showAll, visitStep };
begin();
