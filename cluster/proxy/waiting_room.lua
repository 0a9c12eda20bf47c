-- Lets requests wait at HAProxy while their application has no replica, for example while the only one is replaced.
-- waiting_room.py adds the rules that call it, and declares the bounds.
--
-- Serve reloads HAProxy when replicas change. This process then does not learn of the new ones: its waiting requests go
-- on to the process that has taken over, through a socket on which every such process listens.

local POLL_MS = 100
local GONE_S = 3 -- A waiting request that has not looked for so long has ended: its client has left.

local waiting = {} -- of each request that waits: when it has last looked, its client's address and key
local last_id = 0
local is_replaced, looked_ms = false, 0

local function now_ms()
    local now = core.now()
    return now.sec * 1000 + now.usec // 1000
end

-- Whether another process has taken over. HAProxy computes all its figures for this, so it is asked at most every POLL_MS.
local function has_successor()
    if now_ms() - looked_ms >= POLL_MS then
        is_replaced, looked_ms = tostring(core.get_info()["Stopping"]) ~= "0", now_ms()
    end
    return is_replaced
end

local function has_server(backends)
    for _, name in ipairs(backends) do
        local backend = core.backends[name]
        if backend and backend:get_srv_act() > 0 then
            return true
        end
    end
    return false
end

local function has_room(address, key, bounds)
    local total, of_address, of_key = 0, 0, 0
    for id, one in pairs(waiting) do
        if now_ms() - one.looked_ms > GONE_S * 1000 then
            waiting[id] = nil
        else
            total = total + 1
            of_address = of_address + (one.address == address and 1 or 0)
            of_key = of_key + (one.key == key and 1 or 0)
        end
    end
    return total < bounds.total
        and (address == "" or of_address < bounds.of_address)
        and (key == "" or of_key < bounds.of_key)
end

local function header(txn, name)
    return txn.sf:req_fhdr(name) or ""
end

core.register_action("wait_for_replica", { "http-req" }, function(txn, names, total, of_address, of_key, wait_s, waited)
    local backends = {}
    for name in names:gmatch("[^,]+") do
        backends[#backends + 1] = name
    end
    local bounds = { total = tonumber(total), of_address = tonumber(of_address), of_key = tonumber(of_key) }
    local address, key = txn.sf:src(), header(txn, "authorization") .. header(txn, "x-api-key")
    if not has_room(address, key, bounds) then
        txn:set_var("txn.no_room", true)
        return
    end
    last_id = last_id + 1
    local id = last_id
    local began_ms = now_ms() - (tonumber(header(txn, waited)) or 0) -- Other processes may have let it wait before.
    while not has_server(backends) do
        if has_successor() then
            waiting[id] = nil
            txn.http:req_set_header(waited, tostring(now_ms() - began_ms))
            txn:set_var("txn.onward", true)
            return
        end
        if now_ms() - began_ms > tonumber(wait_s) * 1000 then
            waiting[id] = nil
            txn:set_var("txn.no_room", true)
            return
        end
        waiting[id] = { looked_ms = now_ms(), address = address, key = key }
        core.msleep(POLL_MS)
    end
    waiting[id] = nil
end, 6)
