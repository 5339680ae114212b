import asyncio, time, subprocess, os, redis, redis.asyncio as ra
p=subprocess.Popen(["redis-server","--port","7391","--save",""],stdout=subprocess.DEVNULL)
time.sleep(1)
r=redis.Redis(port=7391, socket_read_size=1<<20)
N=64
for i in range(N): r.set(f"p{i}", os.urandom(2<<20))
names=[f"p{i}" for i in range(N)]
def t(f,what):
    best=0
    for _ in range(5):
        a=time.perf_counter(); f(); best=max(best,N*(2<<20)/1e9/(time.perf_counter()-a))
    print(what, round(best,2))
t(lambda:[r.get(n) for n in names],"sync get one by one")
t(lambda:[r.mget(names[i:i+4]) for i in range(0,N,4)],"sync mget 4")
for lim in (None,1<<20):
    loop=asyncio.new_event_loop()
    a=ra.Redis(port=7391, socket_read_size=1<<20)
    async def one():
        for n in names: await a.get(n)
    async def four():
        for i in range(0,N,4): await asyncio.gather(*(a.get(n) for n in names[i:i+4]))
    t(lambda:loop.run_until_complete(one()),"async one by one")
    t(lambda:loop.run_until_complete(four()),"async 4")
    loop.run_until_complete(a.aclose())
    break
p.kill()
