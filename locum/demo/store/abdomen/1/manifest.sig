{"key": "LXDCtblN+x3J3GR6kjsnO55Aa2ZVBZKgoPj6dqCqMoA=", "signature": "wCZxBfKpDZoDGQiiMvm3uPX6dejrpSL+M3/7ysq6he2nCMMwtYxpCDnJG25OaiUXJiXs1AeAprv/09kLMhJnBQ=="}
