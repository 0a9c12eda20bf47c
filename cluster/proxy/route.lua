-- Asks the router which replica should answer a request. This file takes the place of Ray Serve's own, with its two tables.
-- Where no router answers in time, nothing is set, and HAProxy chooses a replica by itself: any replica can answer.

local TIMEOUT_S = 0.5 -- of each step: connecting, sending, receiving
local MAX_BYTES = 131072 -- Of a larger body, the router gets the beginning and the end.
local KEY_HEADERS = { "authorization", "x-api-key" }

local ROUTERS = @ROUTERS@
local REPLICA_TARGETS = @REPLICA_TARGETS@

local turn = 0 -- of the routers; every thread has its own

local function ask(router, headers, body)
    local socket = core.tcp()
    socket:settimeout(TIMEOUT_S)
    if not socket:connect(router.host, router.port) then
        return nil
    end
    local head = "POST /internal/route HTTP/1.0\r\nHost: " .. router.host_header .. "\r\n" .. headers
    local sent = socket:send(head .. "Content-Length: " .. #body .. "\r\n\r\n" .. body)
    local answer = sent and socket:receive("*a") -- until the router closes the connection
    socket:close()
    return answer
end

local function headers_of(txn, num_bytes)
    local lines = "Connection: close\r\nX-Body-Bytes: " .. num_bytes .. "\r\n"
    for _, name in ipairs(KEY_HEADERS) do
        local value = txn.sf:req_fhdr(name)
        if value and value ~= "" then
            lines = lines .. name .. ": " .. value .. "\r\n"
        end
    end
    return lines
end

local function follow(txn, answer, targets)
    local server = targets[answer:match('"replica_id"%s*:%s*"([^"]+)"') or ""]
    if not answer:match("^HTTP/[%d%.]+ 200") or not server then
        return
    end
    local headers = answer:match('"request_headers"%s*:%s*{(.-)}') or ""
    for name, value in headers:gmatch('"([^"]+)"%s*:%s*"([^"]*)"') do
        txn.http:req_set_header(name, value)
    end
    txn:set_var("txn.ingress_request_router_target", server)
    txn:set_var("txn.via_ingress_request_router", true)
end

core.register_action("route_via_ingress_request_router", { "http-req" }, function(txn)
    local app = txn:get_var("txn.ingress_request_router_app")
    local routers, targets = ROUTERS[app], REPLICA_TARGETS[app]
    if not routers or not targets then
        return
    end
    local body = txn.sf:req_body() or ""
    local headers = headers_of(txn, math.max(#body, tonumber(txn.sf:req_fhdr("content-length")) or 0))
    if #body > MAX_BYTES then
        body = body:sub(1, MAX_BYTES // 2) .. body:sub(-MAX_BYTES // 2)
    end
    turn = turn + 1
    for i = 1, #routers do
        local answer = ask(routers[(turn + i) % #routers + 1], headers, body)
        if answer then
            follow(txn, answer, targets)
            return
        end
    end
end, 0)

-- HAProxy outlives the manager that has started it, since Ray replaces that; but not Ray's own process on this node.

local function parent_of(pid)
    local file = io.open("/proc/" .. pid .. "/stat")
    local parent = file and file:read("a"):match(".*%) %a (%d+)")
    if file then
        file:close()
    end
    return parent
end

local manager = parent_of("self")
local raylet = manager and parent_of(manager)

core.register_task(function()
    while raylet and parent_of(raylet) do
        core.msleep(1000)
    end
    core.Alert("Ray has ended on this node: HAProxy ends too")
    os.exit(0)
end)
