//go:build linux && escape

package main

import "maps"

// techniques returns the functions behind the plan, by name.
func techniques() map[string]func(*attempt) {
	all := map[string]func(*attempt){}
	for _, some := range []map[string]func(*attempt){
		addresses(), names(), rebinding(), overTLS(), overHTTP(), overSSH(), packets(), neighbours(), limits(), secrets(), reflections(), services(),
	} {
		maps.Copy(all, some)
	}
	return all
}
