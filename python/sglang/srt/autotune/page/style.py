"""The page's style sheet: two colour schemes, one column, tables that scroll by themselves."""

CSS = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #16181d; --soft: #5b6270; --rule: #dfe3e9;
  --tuned: #0b66c3; --default: #b4530a; --good: #12733a; --warn: #92500a; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101216; --card: #191c22; --ink: #e8eaee; --soft: #9aa3b2; --rule: #2c313a;
    --tuned: #6cb2ff; --default: #f0a35e; --good: #6bd08f; --warn: #f0b45e; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 960px; margin: 0 auto; padding: 20px 16px 48px; }
h1 {
  font-size: 22px; line-height: 1.25; margin: 0 0 4px;
  display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: center;
}
h2 { font-size: 16px; margin: 0 0 10px; }
h3 { font-size: 13px; margin: 16px 0 6px; color: var(--soft); font-weight: 600; overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
section, header { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px; }
section { margin-top: 14px; }
.badge {
  display: inline-block; padding: 1px 10px; border-radius: 999px; border: 1px solid currentColor;
  font-size: 13px; font-weight: 600;
}
.completed { color: var(--good); } .skipped, .running, .pending { color: var(--warn); } .failed { color: var(--bad); }
.soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(116px, 1fr)); gap: 8px; margin-top: 14px; }
.tile { border: 1px solid var(--rule); border-radius: 8px; padding: 8px 10px; }
.tile b { display: block; font-size: 20px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 13px; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; white-space: nowrap; }
td:first-child { white-space: nowrap; }
dl { display: grid; grid-template-columns: minmax(110px, max-content) 1fr; gap: 4px 16px; margin: 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { overflow-x: auto; margin: 8px 0 0; }
summary { cursor: pointer; font-weight: 600; }
ul { margin: 0; padding-left: 18px; } li { overflow-wrap: anywhere; margin-bottom: 4px; }
.warn { border-left: 4px solid var(--warn); }
svg { display: block; width: 100%; height: auto; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg text { fill: var(--soft); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dot { stroke: var(--card); stroke-width: 1; }
svg .line.tuned { stroke: var(--tuned); } svg .dot.tuned, svg .label.tuned { fill: var(--tuned); }
svg .line.default { stroke: var(--default); stroke-dasharray: 5 4; }
svg .dot.default, svg .label.default { fill: var(--default); }
svg .label { font-weight: 600; font-size: 13px; }
.bar { height: 10px; border-radius: 5px; background: var(--rule); overflow: hidden; margin: 14px 0 8px; }
.bar i { display: block; height: 100%; background: var(--tuned); }
@media (max-width: 560px) {
  main { padding: 10px 8px 32px; }
  section, header { padding: 12px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; }
  table { font-size: 13px; } th { font-size: 12px; } th, td { padding: 4px 9px 4px 0; }
  svg text, svg .label { font-size: 21px; } svg .line { stroke-width: 3.5; } svg .dot { r: 6px; }
}
@media print { section, header { break-inside: avoid; } }
"""
