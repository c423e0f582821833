//go:build linux && escape

package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// tokens are found wherever they stand.
var tokens = regexp.MustCompile(`tk[0-9]{3}[ws][0-9a-f]{8}`)

// listen is the second VM: it offers a service, and records every token that a
// frame brings to its card. What it found is in the file that it prints to.
func listen() error {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(plan.GuestPort))
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Minute)) // it is only a token long
				b := make([]byte, 4096)
				n, _ := c.Read(b)
				fmt.Printf("service %s\n", tokens.Find(b[:n]))
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n"+os.Getenv("CANARY")+"\n") // the client is gone if it fails
			}()
		}
	}()
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, int(htons(syscall.ETH_P_ALL)))
	if err != nil {
		return err
	}
	fmt.Println("listening")
	b := make([]byte, 65536)
	for {
		n, from, err := syscall.Recvfrom(fd, b, 0)
		if err != nil {
			return err
		}
		if ll, ok := from.(*syscall.SockaddrLinklayer); ok && ll.Pkttype == syscall.PACKET_OUTGOING {
			continue
		}
		if token := tokens.Find(b[:n]); token != nil {
			fmt.Printf("frame %s\n", token)
		}
	}
}
