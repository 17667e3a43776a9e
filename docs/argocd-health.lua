-- Argo CD's health of a TrainingJob: resource.customizations.health.spillway.dev_TrainingJob in argocd-cm.
--
--   Degraded     the job failed, or its spec is rejected
--   Suspended    spec.suspend has taken effect
--   Healthy      it trains, or it is complete
--   Progressing  something is waited for; the message says what
--
-- true: a job that trains is Progressing, so that the next sync wave waits until it is complete.
local wait_for_the_end = false

local status = obj.status or {}

local function find(kind)
  for _, condition in ipairs(status.conditions or {}) do
    if condition.type == kind then
      return condition
    end
  end
  return {}
end

local function sentence(condition)
  local text = condition.type .. ": " .. (condition.reason or condition.status)
  if condition.message ~= nil and condition.message ~= "" then
    text = text .. ": " .. condition.message
  end
  return text
end

local function health(word, message)
  return { status = word, message = message }
end

if obj.metadata.deletionTimestamp ~= nil then
  return health("Progressing", "it is being deleted")
end
if status.conditions == nil then
  return health("Progressing", "the operator has not looked at it yet")
end
if status.observedGeneration ~= obj.metadata.generation then
  return health("Progressing", "the operator has not looked at this spec yet")
end
for _, kind in ipairs({ "Failed", "Complete" }) do
  if find(kind).status == "True" then
    return health(kind == "Failed" and "Degraded" or "Healthy", sentence(find(kind)))
  end
end
if find("Stalled").status == "True" then
  return health("Degraded", sentence(find("Stalled")))
end
if find("Suspended").status == "True" then
  return health("Suspended", sentence(find("Suspended")))
end
if find("Ready").status == "True" then
  local progress = status.progress or {}
  local steps = "step " .. (progress.step or 0) .. " of " .. (progress.steps or obj.spec.training.steps)
  return health(wait_for_the_end and "Progressing" or "Healthy", steps)
end
if obj.spec.suspend then
  return health("Progressing", sentence(find("Suspended")))
end
for _, kind in ipairs({ "Accepted", "Planned", "QuotaReserved", "Scheduled", "Running" }) do
  local condition = find(kind)
  if condition.status ~= nil and condition.status ~= "True" then
    return health("Progressing", sentence(condition))
  end
end
return health("Progressing", find("Running").type and sentence(find("Running")) or "the operator is at work")
