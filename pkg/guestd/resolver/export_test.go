package resolver

import "time"

// StopClock makes it always the same moment, so that no time of an answer runs out.
func (p *Proxy) StopClock() {
	at := time.Now()
	p.now = func() time.Time { return at }
}
