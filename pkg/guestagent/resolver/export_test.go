package resolver

import "time"

// StopClock freezes the proxy's time, so that no answer expires.
func (p *Proxy) StopClock() {
	at := time.Now()
	p.now = func() time.Time { return at }
}
